"""What a model's step would take on each mesh of devices, and which mesh is the fastest that fits.

calibration, candidates, prediction   arithmetic on what was measured, in plain Python
part_timing, step_timing, tiny_model  what is measured beside the layers
planner                               measures a model, and ranks the candidates
"""
