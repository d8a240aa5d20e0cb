"""The broker: stores messages and serves consumer groups.

    server             start, stop, and which actor gets a request
    produce            PRODUCE: check a batch, append it, answer when it is durable
    consume            JOIN, LEAVE, heartbeats and SETTLE for the consumers of all groups
    pull               PULL: decide a range, read it, hand it out; keys of fresh messages; rates of groups
    message_reader     finds and reads the batches of a pull or a scan
    cold_reads         reads segments that are not in the page cache, beside the loop
    response_bounds    bounds on the messages and bytes of one pull's answer
    groups             the groups of this broker, as the action log names them
    group_coordinator  applies the decisions of the group state machines and writes them to the action log; keeps
                       requests that wait: pulls of paused consumers, scans that watch a subject
    inbox              messages that only one group gets, pulled in turns with its subject
    dead_letters       copies messages that failed their last attempt to the dead-letter subject, and sends them back
    message_copies     how dead_letters finds the copies that were made before a crash
    scan               SCAN, RETRACE, INDEX and NAMES: reading without a group
    admin              operator commands: seek, configure, pause, weight, read-only, removal and the like
    descriptions       answers to requests for lists and descriptions of subjects and groups
    standalone_routes  a broker without a meta server answers route requests itself
    maintenance        removes unused groups, and says what retention may take
    metrics            the /metrics page
    broker_copy        a broker as one copy of a broker group; groups that are switched off on all brokers

A produced message travels like this: a `ServerSession` (`fairway.serving`) reads the frame, `server.Broker.handle` puts
the request into the subject's mailbox, and `produce` appends the batch to the message log. After the sync, `produce`
answers the producer, and the coordinator wakes the actors of the subject's groups. A waiting PULL then runs in its
group's actor: `pull` asks the group's state machine for a range, reads the range and answers through the session.
"""
