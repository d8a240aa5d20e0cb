"""Every bound, with its unit in its name and its reason beside it.

A bound that an operator may change is the default of an option elsewhere; a bound that a format depends on is here
alone.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- the batch -------------------------------------------------------------------------------------------------------
BATCH_MESSAGES_MAX = 4_096  # a lot is at most 1,000 messages: a few batches either way; offsets stay in a page or two
BATCH_RAW_BYTES_MAX = 64 * MIB  # decompressed columns; below 2**31, so that Arrow's int32 offsets suffice
BATCH_TAGS_MAX = 16  # per message; a filter names at most as many
TAG_BYTES_MAX = 128
KEY_BYTES_MAX = 1 * KIB
HEADERS_MAX = 64  # per message

# --- names -----------------------------------------------------------------------------------------------------------
NAME_CHARS_MAX = 200  # leaves room for a suffix in the 255 bytes of a file name

# --- the logs --------------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 256 * MIB  # a segment's index stays in memory while it is written: 57 MiB with one message per batch
ACTION_SEGMENT_BYTES = 16 * MIB  # reserved on disk in advance, twice: what acks may need on a full disk
UNSYNCED_BYTES_MAX = 64 * MIB  # gathered and not yet synced; past it appends are refused as BUSY
DISK_LOW_WATER_BYTES = 128 * MIB  # below it produce is READ_ONLY, and checkpoints and actions still find room
CHECKPOINT_EVERY_BYTES = 64 * MIB  # of message log: replay after a crash reads at most about this much
CHECKPOINTS_KEPT = 2  # an unreadable one means the one before it
OPEN_SEGMENTS_MAX = 64  # descriptors kept open for reading
INDEX_CACHE_BYTES = 64 * MIB  # runs of older segments' indexes kept in memory for readers that are behind

# --- the dedupe window -----------------------------------------------------------------------------------------------
STREAM_BATCHES_MAX = 64  # remembered per stream; a producer has at most as many batches in flight
STREAMS_MAX = 100_000  # remembered in all: about 100 MiB when each is full to the brim, a tenth in practice
STREAM_IDLE_MS_MAX = 7 * 24 * 3_600_000  # a week: a weekend's outage and the Monday after it
