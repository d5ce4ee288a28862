"""What is where, decided in plain Python before anything is built.

mesh      how many pieces of the rows, stages of the layers, parts of a split layer
layout    a mesh, the device of each coordinate, the stage and the split of each layer
schedule  which stage works on which micro-batch, in which order
"""
