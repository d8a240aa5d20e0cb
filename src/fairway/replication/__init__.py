"""Several copies of the same two logs: one leads, the others follow it byte for byte.

    law        who leads, who follows, who waits: pure decisions from what the registry says
    promotion  another master, by hand
    node       the group's node in the registry: read, changed by compare-and-set, read back where nobody knows
    leader     the master's side: what each replica has synced, what is committed by that, whose copies count
    log_answers  what the master says of its logs to anybody: their extent, their records, bytes to repair with
    peer       one replica, as its master sees it
    repairs    what has rotted in the master's own logs, and which copy is asked for it; giving: that copy's side
    follower   the replica's side: finds where two histories part, then takes what comes and says what it has synced
    wire       the replica's connection to its master
    figures    what a copy shows of itself; tally: what it counts, through all reigns of its process
    promise    the highest epoch that this copy has ever served, kept in its directory
    member     the life of a copy: registers, looks who leads, follows or leads itself; `membership` has its words
    place      its node in the registry
    standing   what it may answer now

Why nothing that was acknowledged is lost by a change of masters:

1. *Committed* means synced on every copy of the set that the master waits for, and only what is committed is answered
   or shown. That set always contains the in-sync set in the registry: a copy is waited for before it is written there,
   and waited for no longer only after it was removed there.
2. Only a copy of the in-sync set takes over (`promote --accept-data-loss` apart), by compare-and-set on the group's
   node, with the next epoch. So every successor holds everything that was committed when it took over.
3. Whoever takes over, or has learned of a later epoch, acknowledges nothing to an earlier master any more. A deposed
   master's set contains its successor, and it cannot make the set smaller: its compare-and-set fails. So it confirms
   nothing.
4. An epoch and a position name one record for ever. One leader writes an epoch; only what is synced locally is sent,
   and a full disk undoes nothing that was synced. So where two copies have the same record in a place, everything below
   is the same, and what a returning copy has beyond the last common record was never committed: its successor would
   have it. That is cut off, and kept aside.
5. A replica follows no epoch below the one it has promised, or that its own logs have reached. The promise is on disk
   before the first acknowledgement under a new epoch.
6. A master serves nothing once `certain_until_ns` has passed: until then no other copy can have seen its session end.
   That keeps two masters from handing out the same messages; points 1 to 3 hold without any clock.
7. A compare-and-set of unknown outcome is read back before anything is concluded. Until then both outcomes hold: the
   set that is waited for is the larger one.
"""
