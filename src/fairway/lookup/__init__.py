"""Lookup: requests of clients and servers to meta servers, for routes and for the registry.

    routes       keeps the routes of subjects fresh, with look-ups and long polls
    registries   opens a registry by its URL; single requests on a loop; the registry of a meta server, over the wire

Clients and delay servers add `Routes` to their line to a meta server. Servers call `open_registry`. With a `meta://`
URL they get a `RemoteRegistry`, which sends its requests through an `Inquirer`. Careers without ZooKeeper use a
`RemoteRegistry`, too.
"""
