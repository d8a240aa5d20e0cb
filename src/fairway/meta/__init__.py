"""Meta server: tells clients which broker groups carry a subject, and serves the registry to servers without ZooKeeper.

    server              the meta server: its port, its probes, its own node in the registry
    registry_watcher    keeps the cluster state as the registry has it
    cluster_state       the registry's records in memory, with a version for each change; the routes made of them
    route_requests      answers ROUTE: look-ups, long polls, subjects created on first use
    admin               answers GOVERN: the decisions of operators
    decommission_check  asks masters for messages that nobody has consumed or sent, before a group is given up
    route_upkeep        removes unused routes, and repairs missing ones
    registry_requests   answers REGISTER: the registry over the wire
    registry_access     what REGISTER may read and write, as a table

A client's ROUTE request goes from `server` to `route_requests`, which answers from `cluster_state`, or waits. When a
node of the registry changes, `registry_watcher` updates `cluster_state`, and the waiting polls about that node are
answered. A GOVERN request goes to `admin`, which changes the registry and then `cluster_state`.
"""
