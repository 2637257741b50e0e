"""The shim's connections: to the supervisor, and those of strangers until they authenticate."""
