"""Layouts and schedules, decided in plain Python before anything is built.

mesh      the number of replicas, of pipeline devices, of parts of a split layer
layout    a mesh, the device of each coordinate, the stage and the split of each layer
schedule  the order in which each device runs stages on micro-batches
"""
