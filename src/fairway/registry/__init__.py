"""Registry: a small tree of nodes where servers register, elect masters and keep cluster metadata.

    port          the interface: nodes with versions, sessions, ephemeral nodes, watches
    layout        the paths and records that Fairway keeps in the registry
    sqlite        the registry in an SQLite file, for one meta server
    zookeeper     the registry on ZooKeeper
    kazoo_client  ZooKeeper's Python client, kazoo, on an event loop
    tree          the rules of the tree, in memory; no I/O
    sessions      how long sessions live, for clients and for servers; the watches of one session

A caller opens a registry, reads and changes nodes with compare-and-set, and sets watches. An implementation asks `tree`
what a change does, stores the change, applies it, and calls the watches. Two more implementations lie elsewhere:
`fairway.lookup.registries`, which also opens any registry by its URL, has the registry of a meta server, over the wire,
and `fairway.simulation.registry` one on virtual time, with faults, for tests.
"""
