# The tools are pinned here and built by Go itself: the first run of each takes a minute or two.
GOLANGCI_LINT := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := go run golang.org/x/vuln/cmd/govulncheck@v1.9.0

# The race detector needs a C compiler.
RACE := $(shell command -v cc >/dev/null 2>&1 && echo -race)

# Only go.work lists the modules. The pattern "work" stands for the packages of all of them.
MODULES = $(shell go list -m -f '{{.Dir}}')

# testrun runs go test and prints one line for each reason to skip a test. Vet is off because make lint vets the code. Many tests wait for
# a lock, so four run at once in each package; the connections of a server are enough for that. A package that hangs ends after twenty
# minutes.
TESTRUN := go run ./internal/testrun
EXPECT   = $(if $(CI),-expect .ci/skips)
FLAGS   := -vet=off -parallel 4 -timeout 20m

# PURE: packages whose tests need no server. CONCURRENT: packages whose own code is concurrent; make test adds the race detector for them.
PURE       := ./internal/address ./internal/arg ./internal/batch ./internal/bucket ./internal/guard ./internal/leaktest ./internal/pgerr ./internal/shape \
	./internal/testrun ./internal/testsize ./internal/upstream ./internal/words ./otellimit ./promlimit ./ratelimittest ./sloglimit
CONCURRENT := ./internal/batch ./ratelimittest

# RACING: the Limiter, what it is made of, and packages that run it in goroutines of their own.
RACING := $(addprefix ./internal/,adaptive ahead batch gate guard store turns) ./ratelimit ./rules ./httplimit ./scheduler ./integration_test

# PLAIN matches packages whose tests drive a page, a command or a measurement, or read documents: make test-all runs them without
# the race detector, because it would slow them down and find nothing.
PLAIN := /(bench.*|integration_test/(browser/.*|browsertest|consumer|docs|docs/links|scenario)|cmd/ratelimit/internal/cli|internal/shape)$$

# READERS matches packages whose tests read files of other modules. Go's test cache does not see these files, so make test never caches them.
READERS := /(cmd/ratelimit/internal/cli|integration_test/(browser/client|browser/playground|docs|docs/links|driver|scenario))$$

# VERSION=18 runs the tests on Postgres 18 in place of the one on this machine. Tests use the server of a URL, and find installed programs. If
# there are none, a container serves all of them; compiling the command run takes a minute, once.
INSTALLED = $(RATELIMIT_DATABASE_URL)$(DATABASE_URL)$(RATELIMIT_POSTGRES_BINDIR)$(shell command -v initdb pg_ctl)$(wildcard \
	/usr/lib/postgresql/*/bin/initdb /usr/pgsql-*/bin/initdb /opt/homebrew/opt/postgresql*/bin/initdb /usr/local/opt/postgresql*/bin/initdb)
ON = $(if $(VERSION),.ci/postgres $(VERSION),$(if $(INSTALLED),,go run ./ratelimittest/postgres/run))

FUZZ ?= 1000000x

.DEFAULT_GOAL := help
.PHONY: help demo quick test race test-all nightly release general torture fuzz settings mutants cover bench curve compare lint tidy fmt vuln

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Guess a password 200 times at once, and sign in, on a Postgres that it finds or starts
	@$(ON) go test -vet=off -count=1 -v -run '^TestLoginAttack$$' ./integration_test/scenario

quick: ## Test packages that need no server, while you type
	@$(TESTRUN) -brief -- -short $(FLAGS) $(PURE)

test: ## Test every promise once, on a Postgres that the tests find or start; VERSION=18 chooses one of 14 to 18
	@$(ON) $(TESTRUN) -brief $(EXPECT) -- -short $(FLAGS) $(ARGS) $$(go list work | grep -vE '$(READERS)')
	@$(ON) $(TESTRUN) -brief $(EXPECT) -- -short $(FLAGS) -count=1 $(ARGS) $$(go list work | grep -E '$(READERS)')
	@$(if $(RACE),$(TESTRUN) -brief -- -short -race $(FLAGS) $(ARGS) $(CONCURRENT),echo "The race detector needs a C compiler: it was left out.")

race: ## Run the short tests of the Limiter and of what uses it concurrently with the race detector; VERSION=18 chooses a Postgres
	@$(ON) $(TESTRUN) -brief $(EXPECT) -- -short $(RACE) $(FLAGS) $(ARGS) $(RACING)

test-all: ## Run every test at full size, in random order, with the race detector where code is concurrent
	@$(ON) $(TESTRUN) $(EXPECT) -- $(FLAGS) -shuffle=on -count=1 $(ARGS) $$(go list work | grep -E '$(PLAIN)')
	@$(ON) $(TESTRUN) $(EXPECT) -- $(RACE) $(FLAGS) -shuffle=on -count=1 $(ARGS) $$(go list work | grep -vE '$(PLAIN)')

nightly: ## Run the jobs that take hours; JOBS="mutants fuzz" picks some
	@.ci/nightly $(JOBS)

release: ## Run all checks before a release: nightly, an hour of torture, and a million inputs for each fuzz target
	@.ci/nightly
	@$(MAKE) --no-print-directory torture ARGS='-minutes 60' fuzz

general: ## Run integration_test with every call decided in Go on locked rows
	go test -tags generalpath -vet=off -shuffle=on -count=1 -parallel 4 -timeout 20m ./integration_test

torture: ## Make all calls while sessions, clients and servers are killed: ten minutes, or ARGS='-minutes 60 -seed 7'
	RATELIMIT_NIGHTLY=1 go test $(RACE) -vet=off -count=1 -v -timeout 24h -run '^TestTorture$$' ./integration_test/torture -args -minutes 10 $(ARGS)

fuzz: ## Give each fuzz target a million inputs, or FUZZ=10000x; ONLY=Key picks targets
	@.ci/fuzz '$(FUZZ)' '$(ONLY)'

mutants: ## Break the code in each way that .ci/mutants.tsv lists; a short test must fail. ONLY=m01,m13 picks some
	@go run .ci/mutants.go '$(ONLY)'

settings: ## Run integration_test under seven settings of the database, or under SETTINGS="jit=on,jit_above_cost=0"
	@.ci/settings $(SETTINGS)

cover: ## Run every test and write coverage.html, which shows the lines that no test reached
	go test -coverprofile=coverage.out -coverpkg=work work
	go tool cover -html=coverage.out -o coverage.html
	@go tool cover -func=coverage.out | tail -n 1

# rueidis takes a minute to compile, the first time.
bench: ## Measure against peers, on servers it starts: some twenty minutes, or ARGS=-quick
	@cd bench && go run -tags rueidis . $(ARGS)

curve: ## Measure calls a second over the number of callers, and draw it: a quarter of an hour
	@cd bench && go run -tags rueidis . -run '^curve' -rounds 9 -seconds 0.5 -svg ../docs/images -json curves.json $(ARGS)

compare: ## Measure this checkout against another commit: ARGS='-against HEAD~1'
	@cd bench && go run . -against HEAD -contenders '^$$' -rounds 7 -seconds 1 -run '^(take-1|take-16|take-64|take-512|hot-512|tx-1|five-1|five-16)$$' $(ARGS)

lint: ## Check the code, its layout, each go.mod, and the texts of .ci/mutants.tsv
	$(GOLANGCI_LINT) run $(addsuffix /...,$(MODULES))
	$(GOLANGCI_LINT) fmt --diff
	@for module in $(MODULES); do (cd "$$module" && echo "go mod tidy -diff in $$module" && go mod tidy -diff) || exit; done
	@go run .ci/mutants.go -texts

tidy: ## Bring each go.mod in line with what the code imports
	@for module in $(MODULES); do (cd "$$module" && go mod tidy) || exit; done

fmt: ## Format the code as lint requires
	$(GOLANGCI_LINT) fmt

vuln: ## Look for known vulnerabilities in the code that we call
	@for module in $(MODULES); do (cd "$$module" && echo "$$module" && $(GOVULNCHECK) ./...) || exit; done
