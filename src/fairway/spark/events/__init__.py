"""The data source `fairway.events`: what happened to messages, as rows.

source      the classes that Spark calls: the source, the batch reader, the streaming reader with its offsets
plan        the driver's questions about action logs, their cutting into tasks, and the reading of a task
delay_log   the events of delay servers
frames      makes Arrow record batches of actions; the columns of an event
"""
