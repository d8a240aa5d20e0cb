"""The runtime: the machine behind ports, so that a whole cluster can run in one process and be replayed from one seed.

Outside this package, product code takes time, files, sockets, threads, processes and entropy as parameters. The command
line and the Spark jobs may also open files that their user names.

Ports, each with a real implementation here and a simulated one in `fairway.simulation`:

    clock                wall and monotonic time, and a timekeeper that distrusts jumps
    disk                 the port of the storage engine to a file system
    net                  connections as asyncio transports, TCP, and a blocking connection for one thread
    rng                  entropy, or one seed

The real disk:

    real_disk            a locked directory, with its writer and reader threads
    file_system          one open file, a directory held open, and errors turned into faults
    directory_writer     the writer thread of a directory, and small commits on the loop
    shared_directory     a directory that several processes share, with disks of their own
    sqlite_file          an SQLite file, its thread, and a check of its log

Connections of clients:

    threaded_link        for programs without an event loop
    loop_link            for programs with an event loop, and for servers

Processes and threads:

    service              runs a server: its loop, signals, memory and descriptors
    host                 the machine of a program: environment, signals, free ports, keys
    process              child processes that can be killed: a Python module, a ZooKeeper for tests
    threads              jobs and computations beside a loop; bells, gates and locks between threads
    buffers              a large buffer that takes memory only as bytes are written
    terminal             output of the command line, escaped where a terminal shows it
"""
