"""The simulated runtime, from one seed: virtual time, a disk that loses unsynced bytes, a bad network.

simulation    all of it together: `with Simulation(seed=7) as world`
loop          an event loop on virtual time, and the trace of a run
sealed_loop   the calls that a simulated loop refuses, because the seed could not decide them
disk          a disk with crashes, failing syncs, full writes, rot and cold reads
files         the simulated files and directories, and what a power cut leaves of them
net           named hosts that are partitioned, dropped and crashed
transport     one end of a connection, with the guarantees of an asyncio transport
wire          delays, and cuts between two hosts
"""
