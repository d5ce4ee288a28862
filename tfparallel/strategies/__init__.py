"""Drop-in strategies: the devices, and the variables that live on all of them."""
