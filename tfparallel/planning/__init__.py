"""Predicts a model's step time on each mesh of devices, and picks the fastest mesh that fits.

calibration, candidates, prediction   arithmetic on measurements, in plain Python
timing                                measurements in addition to the layers
planner                               measures a model, and ranks the candidates
"""
