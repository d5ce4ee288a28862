"""Replicas that each span several devices: data parallelism of pipelines and of split layers."""
