"""``verl-sat doctor``: what is wrong with a job, before its first GPU-hour."""
