"""The client for programs without a loop: methods block where they must.

client       `connect`, and the client
consumer     a member of a group
connection   connections to one server or to a cluster, and the outcomes of what is sent there
forwarder    the process-forward producer
"""
