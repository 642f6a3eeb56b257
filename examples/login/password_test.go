package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHasher(t *testing.T) {
	t.Parallel()

	t.Run("KnowsThePasswordItHashed", func(t *testing.T) {
		t.Parallel()
		h := newHasher(cheap(), 1)
		stored := h.hash("correct horse")
		for password, want := range map[string]bool{"correct horse": true, "correct horsf": false, "": false} {
			matches, err := h.verify(t.Context(), password, stored)
			require.NoError(t, err)
			require.Equal(t, want, matches, password)
		}
		require.NotEqual(t, stored, h.hash("correct horse"), "no salt")
	})

	t.Run("ReadsWhatTheReferenceImplementationWrote", func(t *testing.T) {
		t.Parallel()
		// From test.c of github.com/P-H-C/phc-winner-argon2, at another cost than the hasher's own.
		const reference = "$argon2id$v=19$m=256,t=2,p=1$c29tZXNhbHQ$nf65EOgLrQMR/uIPnA4rEsF5h7TKyQwu9U1bMCHGi/4"
		h := newHasher(cheap(), 1)
		matches, err := h.verify(t.Context(), "password", reference)
		require.NoError(t, err)
		require.True(t, matches)
	})

	t.Run("RefusesAHashItCannotRead", func(t *testing.T) {
		t.Parallel()
		h := newHasher(cheap(), 1)
		for _, stored := range []string{
			"", "password", "$2y$10$abcdefghijklmnopqrstuv", "$argon2i$v=19$m=64,t=1,p=1$c29tZXNhbHQ$nf65EOgLrQMR",
			"$argon2id$v=19$m=64,t=1,p=1$c29tZXNhbHQ$", "$argon2id$v=19$m=64,t=0,p=1$c29tZXNhbHQ$nf65EOgLrQMR/uIPnA4rEsF5h7TKyQwu9U1bMCHGi/4",
		} {
			_, err := h.verify(t.Context(), "", stored)
			require.ErrorIs(t, err, errBadHash, stored)
		}
		require.Zero(t, h.computed.Load())
	})
}
