"""The typed interfaces between rooms: Protocols only, in process or over HTTP alike."""
