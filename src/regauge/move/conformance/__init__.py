"""The conformance suite: every pair of a catalogue of real layouts is carried and equals the reference, or is refused for cause."""
