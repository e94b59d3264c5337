"""Admission: who is offered to an engine, when, and with whom."""
