"""The storage engine: two logs that are the truth, and the views that can always be made again from them.

    segment, record     what a log file is made of
    log                 a chain of segments: append, read, cut
    flusher             group commit: one sync in flight, the next round gathered meanwhile
    subjects            names and numbers of subjects                     (view)
    consume_log         per subject, where its batches lie                (view)
    dedupe              per producer stream, what was already stored      (view)
    message_log         the log of batches, with its views
    action_log          the log of what happened to messages
    recovery            what to do about a log that a crash or a bad disk left behind
    checkpoint          a picture of the views, so that start-up reads little
    retention           what may be deleted
    directory           whose directory this is
    store               all of it together
    copies              what a store does because others hold the same logs: following takes bytes in, copying gives
                        them out, catching_up syncs less often, cutting and wiping (anew) bring a copy back, mending
                        repairs it
    survey              looks at a directory and changes nothing: tally counts, audit compares, report is the outcome

The way of a message goes on from here to the consume log's readers: `broker/pull`.
"""
