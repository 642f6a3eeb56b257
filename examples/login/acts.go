package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
)

// act is a part of the play: somebody tries to sign in, once or often.
type act struct {
	title string
	after time.Duration // since the act before
	n     int
	tries tries
	as    func(i int) credentials
	want  outcome
}

// outcome is how an act ended, seen from outside but for hashes and refusedBy.
type outcome struct {
	in, wrong, refused int    // answered with 200, 401, 429
	hashes             int    // passwords looked at
	refusedBy          string // the limits that refused
	wait               time.Duration
	answers            int // different bodies of the 401s
}

// acts is the play. Its numbers follow from the limits: 5 tries of an account at once and one more every 3
// minutes; 30 of an address and one more every 30 seconds.
func (st *stage) acts() []act {
	atOnce, oneByOne := st.together, st.every(0)
	wrong := func(login string) func(int) credentials {
		return func(int) credentials { return credentials{login, wrongPassword} }
	}
	right := func(login string) func(int) credentials {
		return func(int) credentials { return credentials{login, passwordOf(login)} }
	}
	const account, client = "login.account", "login.client"
	return []act{
		{
			title: "200 guesses at ada's password at once", n: 200, tries: atOnce, as: wrong("ada"),
			want: outcome{wrong: 5, refused: 195, hashes: 5, refusedBy: account, wait: 3 * time.Minute, answers: 1},
		}, {
			title: "ada, who knows it, meanwhile", n: 1, tries: oneByOne, as: right("ada"),
			want: outcome{refused: 1, refusedBy: account, wait: 3 * time.Minute},
		}, {
			title: "ada, a second before Retry-After is over", after: 3*time.Minute - time.Second, n: 1, tries: oneByOne, as: right("ada"),
			want: outcome{refused: 1, refusedBy: account, wait: time.Second},
		}, {
			title: "ada, when it is over", after: time.Second, n: 1, tries: oneByOne, as: right("ada"),
			want: outcome{in: 1, hashes: 1},
		}, {
			title: "40 guesses at grace's, one every 45 s", n: 40, tries: st.every(45 * time.Second), as: wrong("grace"),
			want: outcome{wrong: 14, refused: 26, hashes: 14, refusedBy: account, wait: 135 * time.Second, answers: 1},
		}, {
			title: "alan, who mistypes twice", n: 2, tries: oneByOne,
			as: func(i int) credentials {
				return credentials{"alan", []string{"alan has a long", "alan has a ling password"}[i]}
			},
			want: outcome{wrong: 2, hashes: 2, answers: 1},
		}, {
			title: "alan, who then gets it right", n: 1, tries: oneByOne, as: right("alan"),
			want: outcome{in: 1, hashes: 1},
		}, {
			title: "a wrong password for ada, and for nobody", n: 2, tries: oneByOne,
			as:   func(i int) credentials { return credentials{[]string{"ada", "nobody"}[i], wrongPassword} },
			want: outcome{wrong: 2, hashes: 2, answers: 1},
		}, {
			title: "one password tried on 40 accounts at once", after: time.Hour, n: 40, tries: atOnce,
			as:   func(i int) credentials { return credentials{fmt.Sprintf("user%02d", i), wrongPassword} },
			want: outcome{wrong: 30, refused: 10, hashes: 30, refusedBy: client, wait: 30 * time.Second, answers: 1},
		},
	}
}

// play plays the acts in turn and prints how each ended, and the rows that each changed.
func (st *stage) play(ctx context.Context, w io.Writer) error {
	fmt.Fprintf(w, "%s\n%s\n%s\n\n", perAccount, perClient, overall)
	fmt.Fprintf(w, "   %-42s %8s %5s %7s %8s %7s  %-13s  %s\n", "who tries what", "at", "tries", "checked", "admitted", "refused", "by", "retry after")
	var changes strings.Builder
	var failed []error
	before := map[bucketID]bucketRow{}
	for i, a := range st.acts() {
		st.clock.Advance(a.after)
		at := st.clock.Now().Sub(st.start)
		got, err := st.perform(ctx, a)
		if err != nil {
			return fmt.Errorf("%s: %w", a.title, err)
		}
		fmt.Fprintf(w, "%d  %-42s %8s %5d %7d %8d %7d", i+1, a.title, short(at), a.n, got.hashes, got.in, got.refused)
		if got.refused > 0 {
			fmt.Fprintf(w, "  %-13s  %s", got.refusedBy, short(got.wait))
		}
		fmt.Fprintln(w)
		if got != a.want {
			fmt.Fprintf(w, "   MISMATCH: this was %+v\n        and should be %+v\n", got, a.want)
			failed = append(failed, fmt.Errorf("act %d did not end as it should: %s", i+1, a.title))
		}
		after, err := st.rows(ctx)
		if err != nil {
			return err
		}
		st.describeChanges(&changes, i+1, before, after)
		before = after
	}
	fmt.Fprintf(w, "\nThe rows of ratelimit.buckets that each changed, as (value, ts); keys are stored as their HMAC:\n\n%s", &changes)
	return errors.Join(failed...)
}

// perform plays one act.
func (st *stage) perform(ctx context.Context, a act) (outcome, error) {
	st.mu.Lock()
	st.refusedBy = map[string]int{}
	st.mu.Unlock()
	hashes := st.auth.hasher.computed.Load()
	replies, err := a.tries(ctx, a.n, a.as)
	if err != nil {
		return outcome{}, err
	}
	var got outcome
	answers := map[string]bool{}
	for _, r := range replies {
		switch r.status {
		case http.StatusOK:
			got.in++
		case http.StatusUnauthorized:
			got.wrong++
			answers[r.body] = true
		case http.StatusTooManyRequests:
			got.refused++
			got.wait = max(got.wait, r.retryAfter)
		default:
			return outcome{}, fmt.Errorf("status %d: %s", r.status, r.body)
		}
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	got.hashes = int(st.auth.hasher.computed.Load() - hashes)
	got.refusedBy = strings.Join(slices.Sorted(maps.Keys(st.refusedBy)), ", ")
	got.answers = len(answers)
	return got, nil
}
