"""A fuzzer: random Keras programs, trained on one device and under every form."""
