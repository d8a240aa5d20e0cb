"""A client of a cluster: one connection to a meta server, and one to each broker group that its subjects are on.

client     the routes and connections, the broker group of each message, and batches that move to another group
consumer   one consumer session on each broker group of a subject, used as one session
requests   asks every broker group that a request concerns, and merges the answers

The package does no I/O of its own. `fairway.client.sync.connection` and `fairway.client.aio.connection` add the
waiting.

A message goes to the partitioner of its subject, which picks a connection. While no route is known, the connection to
the meta server keeps the message. When the meta server answers, `ClusterClient` lends what has waited there to the
right broker group.
"""
