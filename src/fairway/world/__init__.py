"""The world as a parameter: clock, disk, net and randomness, each real and simulated.

Nothing outside this package touches time, files, sockets, threads or entropy by itself, so that a whole cluster can run
in one process on virtual time and be replayed from one seed.
"""
