"""The client: a synchronous and an asyncio face over the sans-IO sessions of `fairway.protocol`."""
