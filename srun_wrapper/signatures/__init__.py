"""From the lines of a failed job's log to its first cause: a catalogue as data, a reader, rules."""
