"""Network policy and names; drives one worker per instance."""
