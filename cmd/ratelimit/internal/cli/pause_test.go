package cli_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

func TestPause(t *testing.T) {
	t.Parallel()

	t.Run("EndsByItselfOrIsResumed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		type changed struct {
			Limit, Key, Author, Reason string
			Until                      time.Time
			Version                    int64
		}
		until := time.Now().Add(2 * time.Hour).UTC().Truncate(time.Second)
		c := read[changed](t, f, 0, "pause", "sends", "ada", "--until", until.Format(time.RFC3339), "--reason", "a leak", "--author", "joan")
		require.Equal(t, changed{"sends", "ada", "joan", "a leak", until, 2}, c)
		f.fails(t, 3, "take", "sends", "ada")
		f.ok(t, "take", "sends", "bob")
		require.Equal(t, "ana", read[changed](t, f, 0, "resume", "sends", "ada", "--reason", "over").Author, "the user of the system")
		f.fails(t, 6, "resume", "sends", "ada", "--reason", "over", "--author", "joan")
		f.ok(t, "take", "sends", "ada")
		require.Contains(t, f.fails(t, 6, "resume", "sends", "ada", "--reason", "again"), "there is no such pause")
		require.Contains(t, f.fails(t, 2, "pause", "sends", "ada", "--until", "2020-01-01T00:00:00Z", "--reason", "x"), "use a later Until")
	})

	t.Run("OfAWholeLimitIsConfirmed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		args := strings.Fields("pause sends --for 10m --reason down")
		f.fails(t, 2, args...)
		f.ok(t, "take", "sends", "ada")
		require.Contains(t, f.ok(t, append(args, "--yes")...), "(every key)")
		f.fails(t, 3, "take", "sends", "ada")
		f.ok(t, "resume", "sends", "--reason", "up")
	})

	t.Run("ThatIsEndedIsToldWhichOthersThereAre", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		f.ok(t, "pause", "sends", "--for", "1h", "--reason", "down", "--yes")
		for _, key := range []string{"ada", "bob"} {
			f.ok(t, "pause", "sends", key, "--for", "1h", "--reason", "a leak")
		}
		all := "every key of sends is still paused, until 2"
		require.Contains(t, f.run(t, "resume", "sends", "ada", "--reason", "over").err, all)
		require.Contains(t, f.fails(t, 6, "resume", "sends", "ada", "--reason", "over"), all)
		r := f.run(t, "resume", "sends", "--reason", "up")
		require.Equal(t, 0, r.code)
		require.Contains(t, r.err, "1 key of sends still paused; ratelimit rules get sends shows them")
		require.Empty(t, f.run(t, "resume", "sends", "bob", "--reason", "over").err)
		f.ok(t, "take", "sends", "bob")
	})

	t.Run("OfALimitThatNothingKnowsIsNoted", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		r := f.run(t, "pause", "snds", "ada", "--for", "10m", "--reason", "down")
		require.Equal(t, 0, r.code)
		require.Contains(t, r.err, `there is no rule and no bucket of a limit "snds"; check its spelling: the limits with rules are sends`)
		require.Empty(t, f.run(t, "pause", "sends", "ada", "--for", "10m", "--reason", "down").err)
		f.ok(t, with(window(), "take", "code", "ada")...)
		require.Empty(t, f.run(t, "pause", "code", "ada", "--for", "10m", "--reason", "down").err)
	})

	t.Run("TheAuthorIsWhoIsNamed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, c := range []struct {
			env  []string
			want string
		}{
			{[]string{"USER=ana"}, "ana"},
			{[]string{"USER=root", "SUDO_USER=bob"}, "bob"},
			{[]string{"USER=ana", "RATELIMIT_AUTHOR=Joan"}, "Joan"},
		} {
			env := append([]string{"RATELIMIT_DATABASE_URL=" + f.url}, c.env...)
			r := run(t.Context(), env, "", "pause", "sends", "ada", "--for", "1h", "--reason", "x")
			require.Equal(t, 0, r.code, r.err)
			entries, err := f.store.History(t.Context(), rules.HistoryQuery{Most: 1})
			require.NoError(t, err)
			require.Equal(t, c.want, entries[0].Author)
		}
		r := run(t.Context(), []string{"RATELIMIT_DATABASE_URL=" + f.url, "USER=root"}, "", "pause", "sends", "ada", "--for", "1h", "--reason", "x")
		require.Equal(t, 2, r.code)
		require.Contains(t, r.err, "give --author, or set RATELIMIT_AUTHOR")
	})
}
