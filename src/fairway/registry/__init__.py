"""Registry: a small tree of nodes where servers register, elect masters and keep cluster metadata.

    port                 the interface: nodes with versions, sessions, ephemeral nodes, watches
    layout               the paths and records that Fairway keeps in the registry
    urls                 opens a registry by its URL
    sqlite               the registry in an SQLite file, for one meta server
    row_checksums        checksums of that file's rows
    zookeeper            the registry on ZooKeeper
    kazoo_client         ZooKeeper's Python client, kazoo, on an event loop
    tree                 the rules of the tree, in memory; no I/O
    session_leases       how long sessions live, for clients and for servers
    watches              the watches of one session

A caller opens a registry, reads and changes nodes with compare-and-set, and sets watches. An implementation asks `tree`
what a change does, stores the change, applies it, and calls the watches. Two more implementations lie elsewhere:
`fairway.lookup.registries` has the registry of a meta server, over the wire, and `fairway.simulation.registry` one on
virtual time, with faults, for tests.
"""
