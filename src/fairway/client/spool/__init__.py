"""The spool: batches that no broker takes now wait in files on this machine, and leave from there in order.

spool            the spool of a client with one broker: its options, the choice of the send path, the room on disk; the
                 handle that a client holds, and the thread that adopts the journals of dead processes
cluster          the spool of a cluster client: one journal, and a gate beside the connection to each broker group
journal          one journal on disk: batches are appended at one end and leave at the other
journal_files    the bytes of a journal's files, and recovery, which reads and repairs them after a crash
drain            sends the batches of journals to one broker
assignment       sends the batches of journals to the broker groups of a cluster
spool_directory  lists and counts what a spool directory holds; sends again, or discards, what is stuck there

The path of a batch: `SpoolPolicy` (`spool`) decides that the producer diverts. The producer hands the batch over, the
journal appends and syncs it, and the sender gets a `SpoolBatchReceipt`. `SpoolDrain` or `SpoolAssignment` loads the
batch again, sends it, and tells the journal when the broker has it. The journal removes a segment when all its batches
are done.
"""
