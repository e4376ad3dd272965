"""What several processes do together: collectives, turns, joint decisions."""
