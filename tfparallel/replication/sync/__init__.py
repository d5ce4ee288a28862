"""When replicas and workers synchronize, and when the weights change: the option `sync=`."""
