"""The client for programs without a loop: methods block where they must.

client       `connect`, and the client
consumer     a member of a group
receipts     the results of `send`, which threads can wait for, and `client.delayed`
connection   one connection to a server, with the link whose thread reads
cluster      sends and asks in a cluster, and waits for several broker groups
forwarder    the process-forward producer
coalescing   merges equal requests among the threads of a process
"""
