"""Find a failed job's first cause in the lines of its log: a catalogue as data, a reader, rules."""
