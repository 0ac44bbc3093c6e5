"""What happened when: spans of the host, forward and copy lanes."""
