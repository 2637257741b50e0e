"""Writes the pages that come from the code: settings, commands, messages, man pages, completion."""
