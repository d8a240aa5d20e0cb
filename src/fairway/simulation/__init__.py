"""Simulation, from one seed: virtual time, a disk that loses unsynced bytes, a bad network, a registry with faults.

simulation        all of it together: `with Simulation(seed=7) as world`
loop              an event loop on virtual time, what it refuses, and the trace of a run
disk              a disk with crashes, failing syncs, full writes, rot and cold reads
files             the simulated files and directories, and what a power cut leaves of them
net               named hosts that are partitioned, dropped and crashed, and the ends of their connections
wire              delays, and cuts between two hosts
registry          a registry as clients of ZooKeeper see one, with faults
registry_client   its client

`fairway.testing` runs on it, and so do the simulations of Fairway's own tests. No server and no client imports it.
"""
