"""What ranks do and did: times of steps (`recorder`), and who waits for whom (`flight_recorder`)."""
