"""Replication of a group's two logs: one copy leads as master, and the others follow it byte for byte.

    leadership      who leads: decisions from the group's node in the registry; promotion by hand
    registration    a copy's own node in the registry; which registered copies a master accepts
    copy_lifecycle  the life of a copy: registers, sees who leads, follows or leads itself
    copies          a copy as its server sees it: options, what it may answer now, metrics
    leader          the master's side: what each replica has synced, what is committed, the in-sync set
    peers           the replicas as their master sees them; answers about its logs; repair of damaged logs
    follower        the replica's side: finds where two histories part, then takes records and confirms them
    connection      the replica's connection to its master

A record travels like this. The master appends and syncs the record, and `leader` sends it as the answer to a REPLICATE
of each replica. `follower` appends it to the replica's log, and confirms it with the next REPLICATE once it is synced.
When every copy of the set has confirmed the record, `leader` moves the committed end, and the server answers its
client.

A change of masters loses nothing that was acknowledged:

1. *Committed* means synced on every copy of the set that the master waits for. The master answers and shows only what
   is committed. That set always contains the in-sync set in the registry. The master waits for a copy before it writes
   the copy there. It stops waiting only after it has removed the copy there.
2. Only a copy of the in-sync set takes over (`promote --accept-data-loss` apart), by compare-and-set on the group's
   node, with the next epoch. So every successor holds everything that was committed when it took over.
3. A copy that takes over, or has learned of a later epoch, acknowledges nothing to an earlier master any more. A
   deposed master's set contains its successor, and it cannot make the set smaller: its compare-and-set fails. So the
   deposed master confirms nothing.
4. An epoch and a position name one record for ever. One leader writes an epoch. It sends only what is synced locally,
   and a full disk undoes nothing that was synced. So where two copies have the same record in a place, everything below
   is the same. Records that a returning copy has beyond the last common record were never committed: its successor
   would have them. The copy cuts them off and keeps them aside.
5. A replica follows no epoch below the one it has promised, or that its own logs have reached. The promise is on disk
   before the first acknowledgement under a new epoch.
6. A master serves nothing once `certain_until_ns` has passed: until then no other copy can have seen its session end.
   That keeps two masters from handing out the same messages. Points 1 to 3 hold without any clock.
7. After a compare-and-set of unknown outcome, the copy reads the node back before it concludes anything. Until then
   both outcomes are possible, and the copy waits for the larger set.
"""
