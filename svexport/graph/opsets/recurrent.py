"""RNN, LSTM, GRU."""
