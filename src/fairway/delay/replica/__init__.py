"""One copy of a group of delay servers: replication, changes of masters, snapshots.

    copy            the lifecycle of one copy
    replica_state   a replica's rows and buckets, made from its master's logs, so that it can lead at any time
    snapshot        the master takes and sends a snapshot; the replica fetches and checks it
    install         puts a received snapshot in place of the old files

A replica follows the logs of its master (`fairway.replication`). If the logs no longer go back far enough, the
replica fetches a snapshot from its master. The copy then closes its server, `install` moves the files into place, and
the copy opens a new server on them.
"""
