"""Training loops as trainers write them, of many kinds, that crash and resume."""
