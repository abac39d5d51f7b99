"""Where runs are kept: one folder each, called by the hash of its configuration, whole at every moment."""
