"""What runs on the ranks: group names bound to process groups, local ranks, the emulated link."""
