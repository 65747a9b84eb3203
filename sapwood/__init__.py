"""The face: command line, in-process Engine, clients."""
