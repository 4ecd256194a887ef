"""What everything else uses and that uses nothing of ours: errors, seeding, processes, the input specification."""
