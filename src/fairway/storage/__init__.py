"""The storage engine: two logs that hold the truth, and views that can always be rebuilt from them.

The message log holds every batch, the action log holds what groups did with the messages. Everything else in a data
directory is a view, and may be lost.

Logs:

    record              the frame of both logs: an 80-byte header and a body
    segment             one file of a log, and its scan from end to end
    log                 a chain of segments (append, read, cut, repair), and the clock that dates its records
    flusher             group commit: one sync in flight, the next round gathers meanwhile
    message_log         the log of batches, and its views together
    action_log          the log of group actions, and which of its segments may go

Views of the message log:

    subjects            names, ids and next sequences of subjects
    consume_log         per subject, where its batches lie
    index_file          the consume log's entries of one segment, on disk
    dedupe              per producer stream, what was stored already

The directory:

    store               one data directory: both logs, checkpoints, disk space, retention
    open_store          opens a directory: checkpoint, indexes, recovery of both logs
    directory           the layout of the directory, and its identity file
    recovery            repairs a log that a crash or a bad disk left behind
    checkpoint          the views at a committed position, so that a start reads little
    retention           how long messages are kept, and which segments may go

Copies:

    replicated_store    the part of a store that other copies need: hold, follow, lead
    log_copies          reads a log for replicas, compares records, and checks a master's bytes before they are appended
    replica_directory   a replica that does not fit its master: cut back, reset, or catching up
    repair              finds lost messages, and writes another copy's bytes over rotten ones

Inspection:

    survey              examines a directory without a change
    survey_report       the values that a survey returns, and the tallies that count them

A produced batch goes through `Store.produce`, `MessageLog.append` (dedupe, subject, sequence), `Log.append` and
`Flusher.add`. The flusher commits its round and calls the waiting request back, which answers with the receipt. A pull
finds the batch through `MessageLog.readable` (consume log) and `MessageLog.read_entries` (message log).
"""
