"""Comparisons with one reference each: functions of a random generator, to a worst deviation."""
