"""Every bound of Fairway, with its unit in its name and its reason beside it.

Some bounds are defaults of options that an operator may change. A bound that a format depends on cannot be changed.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- the batch -------------------------------------------------------------------------------------------------------
BATCH_MESSAGES_MAX = 4_096  # a lot is at most 1,000 messages: a few batches either way; offsets stay in a page or two
BATCH_RAW_BYTES_MAX = 64 * MIB  # decompressed columns; below 2**31, so that Arrow's int32 offsets suffice
CHECK_ON_LOOP_BYTES_MAX = 256 * KIB  # raw length that a broker decompresses on its loop: 0.2 ms, as long as a slice
BATCH_TAGS_MAX = 16  # per message; a filter names at most as many
TAG_BYTES_MAX = 128
KEY_BYTES_MAX = 1 * KIB
HEADERS_MAX = 64  # per message

# --- names -----------------------------------------------------------------------------------------------------------
NAME_CHARS_MAX = 200  # leaves room for a suffix in the 255 bytes of a file name
INTERNAL_CHARS_MAX = 3 * NAME_CHARS_MAX + 14  # of internal subjects, whose names hold two groups and a subject

# --- the logs --------------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 256 * MIB  # a segment's index stays in memory while it is written
SEGMENT_INDEX_BYTES = 57 * MIB  # of that size at most: with one message per batch
ACTION_SEGMENT_BYTES = 16 * MIB  # reserved on disk in advance, twice: what acks may need on a full disk
UNSYNCED_BYTES_MAX = 64 * MIB  # appended and not yet synced; beyond it appends are refused as BUSY
DISK_LOW_WATER_BYTES = 128 * MIB  # below it produce is READ_ONLY, and checkpoints and actions still find room
CHECKPOINT_EVERY_BYTES = 64 * MIB  # of message log: replay after a crash reads at most about this much
CHECKPOINT_EVERY_SUBJECTS = 10_000  # new subjects: three small records each, a second of replay after a crash
KEEP_HOURS = 168  # of messages in a new directory: a week, as long as streams are remembered
CHECKPOINTS_KEPT = 2  # if one is unreadable, the one before it serves
SUBJECTS_MAX = 100_000  # every segment repeats all subjects: 22 MB with the longest names
SUBJECTS_CREATED_BURST = 2_000  # at once: several services that start up; half of them on one connection
SUBJECTS_CREATED_PER_S = 100  # afterwards; half on one connection: the table is not full before 16 minutes have passed
SUBJECT_UNUSED_MS = 3_600_000  # without a message or a group; then it is removed; longer than a slow roll-out takes
ROUTES_EXPIRED_AT_ONCE = 20  # a second: a full table in 83 minutes; each is a request to a broker and a registry write
ROUTES_AUDITED_EVERY_MS = 10_000  # a page of each broker group's subjects: a full table in 17 minutes, within the hour
ROUTES_AUDITED_AT_ONCE = 1_000  # subjects in a page: 1 ms of the meta server's loop
REMOVED_SUBJECTS_MAX = 100_000  # ids remembered, 10 MB; then a mended record may bring a subject back, without its name
SUBJECTS_REMOVED_AT_ONCE = 50_000  # ids in one record: 200 KB; a subject with all its dead letters and inboxes is one
SEQUENCES_AHEAD = 1_000_000  # claimed at a time if durability is `memory`: one extra sync for so many messages
OPEN_SEGMENTS_MAX = 64  # file descriptors kept open for reading
INDEX_CACHE_BYTES = 64 * MIB  # parts of older segments' indexes kept in memory for readers that are behind

# --- permissions -----------------------------------------------------------------------------------------------------
FILE_MODE = 0o600  # of new files: payloads and producers' secrets are private; the umask only narrows it
DIRECTORY_MODE = 0o700  # of new directories: another user could otherwise plant names in them, or list subjects

# --- the dedupe window -----------------------------------------------------------------------------------------------
STREAM_BATCHES_MAX = 64  # remembered per stream; a producer has at most as many batches in flight
STREAMS_MAX = 100_000  # remembered in all; fewer if they take more memory than STREAMS_BYTES_MAX
STREAM_IDLE_MS_MAX = 7 * 24 * 3_600_000  # a week: a weekend's outage and the Monday after it

# --- the protocol ----------------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 66 * MIB  # the largest batch that zstd could not shrink, its section, and a control message
HELLO_FRAME_BYTES_MAX = 4 * KIB  # before the handshake: names and versions; unknown clients get no more memory
CONTROL_BYTES_MAX = 1 * MIB  # decoding makes at most about 40 times as much of it, for a moment
PLAIN_CONTROL_BYTES_MAX = 16 * KIB  # of a request without lists: its own 3 KB, and fields of later versions
URGENT_BYTES_MAX = 64 * KIB  # a request that does not wait and is no larger finds room where others do not
SENTENCE_CHARS_MAX = 500  # of a refusal or a goodbye, with everything that the sentence quotes
FEATURES_MAX = 64  # in a handshake
# of batches of one connection on their way into the log: whoever sends next waits for all that was appended before
UNSTORED_BYTES_MAX = MIB
CONNECTION_REQUESTS_MAX = 1_024  # in flight on one connection: a thousand single messages at once
HEARTBEAT_MS = 10_000  # three missed are 30 s, less than most middleboxes allow an idle connection
HEARTBEAT_MS_MIN = 100  # below it 2,000 idle connections would cost more than the work
HEARTBEAT_MS_MAX = 600_000  # beyond it a dead peer would hold its place for half an hour
REFUSALS_SHARE = 10  # immediate refusals, over all connections, get a tenth of a loop's time
NEW_NAMES_WEIGHT = 0.25  # of produce to all subjects that do not exist yet; one actor has 1
LARGE_FRAME_BYTES = 256 * KIB  # larger frames are read only with room for all of them; one read brings as much
FRAME_BUFFER_FROM_BYTES = 1 * MIB  # gathered in one buffer: joining and freeing smaller frames takes about 1 ms at most
LARGE_FRAMES_WAITING_MAX = 64  # connections that wait for room, each with 256 KiB that came before its pause
FRAME_STALL_MS = 2_000  # how long a sender with room may stall while others wait; three resends of a lost packet
FRAME_WAIT_MS = 20_000  # the longest wait for room; two heartbeats, so that the client does not give up a paused server
FRAME_GRACE_MS = 5_000  # a large frame may take this long while others wait, plus its length at FRAME_BYTES_PER_S_MIN
FRAME_BYTES_PER_S_MIN = 1 * MIB  # 71 s in all for the largest frame
PINGS_MAX = 100  # received in one heartbeat interval: one is due, and an answer costs as much as a small request
HANDSHAKE_MS = 10_000  # from the connection to the end of the handshake; a slow sender holds a place no longer
REDRIVE_IDS_MAX = 10_000  # named in one request; 28 bytes each, so a control message holds them
RETRACE_BYTES_MAX = 512 * KIB  # of a log in one answer, which a control message holds
ROUTE_SUBJECTS_MAX = 5_000  # in one request, long polls included: with the longest names 1 MB
ROUTE_POLLS_MAX = 256  # per kind of asker on one connection; with 500 subjects each, more than there can be subjects
ROUTE_SUBJECT_BYTES = 600  # held by a meta server for each subject of a poll, beside its name: 433 were measured
NAMES_MAX = 1_000  # in one request: with the longest names a control message holds them

# --- connections -----------------------------------------------------------------------------------------------------
CONNECTIONS_MAX = 10_000  # 64 KiB each at most, and a descriptor
CONNECTIONS_MIN = 64  # a server that can take fewer does not start: a few programs with a few processes each need more
SPARE_DESCRIPTORS = 512  # for segments, indexes and buckets (300), probes (64), connections that get a refusal (128)

# --- the registry ----------------------------------------------------------------------------------------------------
GROUP_COPIES_MAX = 256  # of one group, removed copies included: the group's node names each, in 10 KB
SERVER_GROUPS_MAX = 1_000  # of brokers and of delay servers: a meta server watches all of them, and all their copies
REGISTRY_RECORD_BYTES_MAX = 64 * KIB  # of a group or a copy; a delay server's has a figure per broker group
SESSION_NODES_MAX = 8  # per registry session: a copy or a candidate has one, two while it moves
CAREERS_MAX = 10_000  # their folders stay, because they count the tokens: 3 MB with the longest names
CANDIDATES_MAX = 1_000  # of one career: each looks at the list when the one before it goes
EPOCH_MAX = (1 << 63) - 1  # a log record has 64 bits, and so has a number on the wire
EPOCH_LEAP_MAX = 1_000_000  # beyond the registry's: a registry from a backup may lack epochs that a copy has seen
HOST_CHARS_MAX = 255  # of a name in DNS

# --- the consumer ----------------------------------------------------------------------------------------------------
# Batches that a consumer keeps decoded, by their raw length; one batch is kept however large. Four times the default
# prefetch of a consumer, so that ordinary batches are decoded once. Decoded columns and their payloads take up to twice
# this much memory: 64 MiB, or 128 MiB for one batch of the largest size.
DECODED_BYTES_MAX = 32 * MIB

# --- groups ----------------------------------------------------------------------------------------------------------
LOT_MESSAGES_MAX = 1_000  # handed out under one name: a mask of 125 bytes, and one lost lot is little to repeat
RESPONSE_LOTS_MAX = 32  # per pull response: each retry is a lot and an action of its own; 0.6 ms in all
SETTLE_RANGES_MAX = LOT_MESSAGES_MAX // 2  # every second message of a lot
MEMBERS_MAX = 10_000  # per group and subject
MEMBER_LOTS_MAX = 4_096  # held by one consumer: its expiry moves them all in one go, about 4 µs each
GROUP_LOTS_MAX = 100_000  # unacked lots of one group and subject, about 50 MB; beyond it pulls are BUSY
GROUP_PARKED_MAX = 10_000  # messages behind others of their key, about 3 MB; then an ordered group waits
RUN_MESSAGES_MAX = 128  # of one key in one response: one round trip and one sync pay for all of them
GROUP_KEYED_MAX = 1_000_000  # open messages of a group by key, about 150 MB; beyond it pulls are BUSY
GROUP_KEYS_RESTING_MAX = 100_000  # keys of one group that rest by its rate, about 10 MB; then the first rests no longer
GROUPS_MAX = 20_000  # on all subjects: each broadcast consumer is one, and a checkpoint holds them all
RETRY_AFTER_MS_MAX = 24 * 3_600_000  # one day: use a delayed message for longer waits
ATTEMPTS_MAX = 1_000
REASON_BYTES_MAX = 1 * KIB  # of a consumer's reason for a failure; kept in the action log
HISTORY_ATTEMPTS_MAX = 16  # of one message: all with the default of attempts_max, otherwise the first 4 and the last 12
HISTORY_REASON_BYTES_MAX = 200  # of each: the head of a traceback; with a name of 200 an attempt is 0.6 KB in memory
HISTORY_LOTS_MAX = 10_000  # in flight in a group; beyond it failures are not noted. 100 MB at worst, 16 MB in practice
HISTORY_BYTES_MAX = 8 * KIB  # in the header of a dead letter: 1,000 small messages of one lot still fit one batch
BELIEF_MESSAGES_MAX = 1_000_000  # handed out and not yet in the log at a crash: half a second at full speed

# --- delay -----------------------------------------------------------------------------------------------------------
DELAY_HORIZON_MS = 731 * 24 * 3_600_000  # two years, one of them a leap year
DELAY_MESSAGE_BYTES_MAX = 63 * MIB  # the batch that carries the message when it is due adds its id and its time
DELAY_PENDING_MAX = 15_000_000  # messages with an index row in memory, about 60 bytes each: 900 MB
DELAY_UNMOVED_BYTES_MAX = 64 * MIB  # answered and not yet in buckets; beyond it scheduling is BUSY
DELAY_SEGMENT_BYTES = 16 * MIB  # of the delay server's message log: messages on their way into buckets, little else
DELAY_STEP_MESSAGES = 4_096  # loaded or split at a time, about 10 ms: messages that fall due meanwhile wait no longer
DELAY_HISTORY_BYTES = 64 * MIB  # of each log, kept for queries of the past: some 200,000 messages one by one
PENDING_PAGE_MAX = 700  # messages listed in one answer: with the longest keys and subjects a control message holds them
TALLY_STRETCHES_MAX = 10_000  # of a histogram in one answer; a year by the hour is 8,766
INTENT_MESSAGES_MAX = 1_000  # a lot for the consumer that pulls them; an intent that is sent again is little to repeat
INTENT_BYTES_MAX = 1 * MIB  # of payloads; a single larger message has an intent of its own
# Bytes of intents on their way to one broker group; messages that fall due meanwhile stay on disk.
DELAY_OUTSTANDING_BYTES_MAX = 64 * MIB
INTENTS_PER_STREAM_MAX = STREAM_BATCHES_MAX // 2  # not yet noted as sent: a broker must recognise every one of them

# --- memory ----------------------------------------------------------------------------------------------------------
# Bytes that one item takes in a process of CPython 3.11 to 3.13, measured at its worst with the longest names
# (tests/unit/groups/test_snapshot.py and tests/unit/storage/test_weight.py) and rounded up. Accounts count with these.
GROUP_BYTES = 4 * KIB  # a group without members: its state machine, its tables, its name, its timer
MEMBER_BYTES = 1 * KIB  # of a group: the member, its tables, name and verifier, and its connection's binding
LOT_BYTES = 1 * KIB  # a lot that nobody holds: it is in four tables
ATTEMPT_BYTES = 640  # a failed attempt: a name of 200 characters and a reason of 200 bytes
HELD_LOT_BYTES = LOT_BYTES + ATTEMPT_BYTES  # a lot that a consumer holds; with room for its own failed attempt
LOT_PART_BYTES = 320  # a part of a lot that went out in several responses
KEYED_BYTES = 208  # an open message in a group by key: two tables, right after they have grown
PARKED_BYTES = 224  # in addition, for a message behind another of its key
NOTED_KEY_BYTES = 256  # a key that rests or has halted
PAUSED_NAME_BYTES = 512  # the name of a paused consumer
GROUP_RESERVE_BYTES = 8 * KIB  # on top of a group's own bytes: for the members and lots that it may always have
GROUP_MEMBERS_MIN = 2  # members that a group may have although memory is full: one to replace another
GROUP_LOTS_MIN = 2  # lots in hand that a group may have although memory is full: one being handled and the next
GROUP_KEYED_MIN = 2  # messages in each of these lots, in a group by key
GROUPS_BYTES_MAX = 256 * MIB  # of a broker without a memory ceiling: 20,000 groups with little in hand
KEY_WINDOWS_BYTES_MAX = 16 * MIB  # keys that groups by key hand out next, 32 KiB a group; beyond it they are read again
STREAM_BYTES = 512  # of a producer stream, beside its window
STREAMS_BYTES_MAX = 128 * MIB  # of a store without a memory ceiling: 100,000 streams with a dozen batches each
SUBJECT_BYTES = 768  # with the longest name, its entry in the index of a segment and its place in each table
MEMORY_MIB = 4_096  # of a server, unless its operator sets another: all defaults fit, 15 million pending messages too
PROCESS_BYTES = 96 * MIB  # of a server that has just started: 68 MiB with numpy and uvloop, and its threads
FETCHES_BYTES = 16 * MIB  # of cold reads in progress: four with a response each, but only one with the largest frames
CONNECTION_BYTES = 8 * KIB  # of an idle connection: 3.2 KiB (2,000 of them, tests/hostile)
BUDGETS_BYTES_MIN = 64 * MIB  # for everything that grows with clients: 1,400 groups, 4,000 subjects, 800 connections
DELAY_ROW_BYTES = 72  # of a pending message: 61, and one of its columns twice while that grows
DELAY_REMEMBERED_MAX = 1_000_000  # messages that were sent or cancelled, so that answers can say so; at most an hour
NODE_BYTES = 1 * KIB  # of a node of the registry, beside its path and its value
SESSION_BYTES = 4 * KIB  # of a registry session: its lease, its tables of watches, its row in the file
REGISTRY_BYTES_MAX = 256 * MIB  # of a meta server without a memory ceiling
WATCH_BYTES = 2 * KIB  # of a watch in a registry session: a path of 1,000 characters, and its waiter
FEEDS_BYTES = 40 * MIB  # of a meta server: 16 trees, 10,000 changes each
TASK_BYTES = 4 * KIB  # of a meta server, while it answers a request to the registry
