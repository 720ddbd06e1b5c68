"""Where agent runs leave their rows and ranks fetch them: one protocol, three backends."""
