"""The demonstrations: `fairway demo`, `fairway demo cluster`, `fairway demo log`.

broker    a broker, a shop and a stream of orders
shop      the consumer groups of that shop, written as a user writes a program
cluster   a cluster with ZooKeeper, and masters that are killed
servers   the processes of that cluster
log       a store that is killed, recovered, damaged and verified
"""
