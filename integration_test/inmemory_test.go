package integration_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/memstore"
	"github.com/pgratelimit/pgratelimit/internal/store"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// TestInMemory runs tests of what is promised wherever buckets are kept once more, on buckets in memory: setup sees whose
// subtests they are.
func TestInMemory(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(t *testing.T){
		"TestABucketIsLevelledOverItsNewRows":                           TestABucketIsLevelledOverItsNewRows,
		"TestACalendarWindowEndsInTheMidstOfACall":                      TestACalendarWindowEndsInTheMidstOfACall,
		"TestAClockThatWasWrongOfAChangeCreditsNothing":                 TestAClockThatWasWrongOfAChangeCreditsNothing,
		"TestAContextThatEndsInARelease":                                TestAContextThatEndsInARelease,
		"TestACreditAfterAChangeCountsOnce":                             TestACreditAfterAChangeCountsOnce,
		"TestADenyCacheOverTheEndOfACalendarWindow":                     TestADenyCacheOverTheEndOfACalendarWindow,
		"TestAFullBucketStaysFullInOtherRows":                           TestAFullBucketStaysFullInOtherRows,
		"TestAHeldRowStopsOnlyItsOwnCallers":                            TestAHeldRowStopsOnlyItsOwnCallers,
		"TestAHistoryOfChangesCountsEveryToken":                         TestAHistoryOfChangesCountsEveryToken,
		"TestAKeyThatCannotBeStoredIsRefused":                           TestAKeyThatCannotBeStoredIsRefused,
		"TestALeaseIsUndoneWithItsTransaction":                          TestALeaseIsUndoneWithItsTransaction,
		"TestALeaseOfWhichAPartIsLost":                                  TestALeaseOfWhichAPartIsLost,
		"TestALeaseUnderAHashedKey":                                     TestALeaseUnderAHashedKey,
		"TestALimitThatIsOffIsAllowedAndUncharged":                      TestALimitThatIsOffIsAllowedAndUncharged,
		"TestAPauseLetsNothingThroughUntilItEnds":                       TestAPauseLetsNothingThroughUntilItEnds,
		"TestAPauseOfAnUpstreamWhoseRuleChanges":                        TestAPauseOfAnUpstreamWhoseRuleChanges,
		"TestAPlanDecidesAndTheBucketIsOne":                             TestAPlanDecidesAndTheBucketIsOne,
		"TestAPriceThatNobodyCharged":                                   TestAPriceThatNobodyCharged,
		"TestAProcessThatHearsLateAdmitsNoMoreThanThePolicyBeforeHolds": TestAProcessThatHearsLateAdmitsNoMoreThanThePolicyBeforeHolds,
		"TestARefundAtAPriceIsOfWhatWasCharged":                         TestARefundAtAPriceIsOfWhatWasCharged,
		"TestARefusalFromMemoryGoesByTheRule":                           TestARefusalFromMemoryGoesByTheRule,
		"TestARefusedSlotIsAskedForAgain":                               TestARefusedSlotIsAskedForAgain,
		"TestARememberedRefusalEndsWithItsPolicy":                       TestARememberedRefusalEndsWithItsPolicy,
		"TestARememberedRefusalOfEveryKindIsForgotten":                  TestARememberedRefusalOfEveryKindIsForgotten,
		"TestAReservationEndsUnderThePlanItsKeyWasOn":                   TestAReservationEndsUnderThePlanItsKeyWasOn,
		"TestAReservationEndsUnderTheTermsTheLimitHasNow":               TestAReservationEndsUnderTheTermsTheLimitHasNow,
		"TestAReservationOwesWhatThePolicyOfItsInstantAllows":           TestAReservationOwesWhatThePolicyOfItsInstantAllows,
		"TestAResetInANestedTransactionShowsAfterTheCommit":             TestAResetInANestedTransactionShowsAfterTheCommit,
		"TestARuleChangesACalendarWindow":                               TestARuleChangesACalendarWindow,
		"TestASavepointUndoesALease":                                    TestASavepointUndoesALease,
		"TestAShadowRefusesNobodyAndTakesNothingWhenItIsShort":          TestAShadowRefusesNobodyAndTakesNothingWhenItIsShort,
		"TestASlotIsHeldUntilItIsGivenBack":                             TestASlotIsHeldUntilItIsGivenBack,
		"TestASourceThatFailsLeavesTheDefinitionInTheCode":              TestASourceThatFailsLeavesTheDefinitionInTheCode,
		"TestAStoredKeyNeedsNoSecret":                                   TestAStoredKeyNeedsNoSecret,
		"TestAStoredPolicyHoldsFromItsInstant":                          TestAStoredPolicyHoldsFromItsInstant,
		"TestAThousandAMonthInBerlin":                                   TestAThousandAMonthInBerlin,
		"TestAValueOfEveryKindForetells":                                TestAValueOfEveryKindForetells,
		"TestAZoneThatTheServerDoesNotKnow":                             TestAZoneThatTheServerDoesNotKnow,
		"TestAdaptiveInShadow":                                          TestAdaptiveInShadow,
		"TestAdaptivePriceBeyondTheCapacity":                            TestAdaptivePriceBeyondTheCapacity,
		"TestAdaptivePriceOfTwoRequests":                                TestAdaptivePriceOfTwoRequests,
		"TestAdaptiveRefund":                                            TestAdaptiveRefund,
		"TestAdaptiveReserveBeyondTheDebt":                              TestAdaptiveReserveBeyondTheDebt,
		"TestAdaptiveTakeUpTo":                                          TestAdaptiveTakeUpTo,
		"TestAdaptiveWhoseRuleChanges":                                  TestAdaptiveWhoseRuleChanges,
		"TestAnIDOfWhatWasRolledBackReleasesNothing":                    TestAnIDOfWhatWasRolledBackReleasesNothing,
		"TestAnotherEndIsRefused":                                       TestAnotherEndIsRefused,
		"TestAnotherSecretIsRefused":                                    TestAnotherSecretIsRefused,
		"TestBadInputIsNotSent":                                         TestBadInputIsNotSent,
		"TestBatchesOfTwoProcessesShareALimit":                          TestBatchesOfTwoProcessesShareALimit,
		"TestBorrowGuaranteesAndLends":                                  TestBorrowGuaranteesAndLends,
		"TestBorrowIsPartOfTheTransaction":                              TestBorrowIsPartOfTheTransaction,
		"TestBorrowTwiceInACall":                                        TestBorrowTwiceInACall,
		"TestCallersAtOnceGetWhatTheBucketHeld":                         TestCallersAtOnceGetWhatTheBucketHeld,
		"TestCallsAtOnceUnderSeveralRules":                              TestCallsAtOnceUnderSeveralRules,
		"TestCallsThatMixKindsAgreeWithTheExactModel":                   TestCallsThatMixKindsAgreeWithTheExactModel,
		"TestCancel": TestCancel,
		"TestCancelAfterTheLimitWasRaisedTakesNothing": TestCancelAfterTheLimitWasRaisedTakesNothing,
		"TestCharge":                        TestCharge,
		"TestCheckReserveAgreesWithReserve": TestCheckReserveAgreesWithReserve,
		"TestCredit":                        TestCredit,
		"TestCreditIsCappedByTheCapacityAndNotByItsOwnSize":   TestCreditIsCappedByTheCapacityAndNotByItsOwnSize,
		"TestDenyCacheChangesNoAnswer":                        TestDenyCacheChangesNoAnswer,
		"TestDenyCacheIsClosedWithItsLimiter":                 TestDenyCacheIsClosedWithItsLimiter,
		"TestEarlierErasTakeNoRowsOfALaterOne":                TestEarlierErasTakeNoRowsOfALaterOne,
		"TestEndingOldReservationsDoesNotRefillAtTheOldRate":  TestEndingOldReservationsDoesNotRefillAtTheOldRate,
		"TestEndingOldReservationsLosesNothingOfARaisedLimit": TestEndingOldReservationsLosesNothingOfARaisedLimit,
		"TestEndingTwiceChangesNothingTwice":                  TestEndingTwiceChangesNothingTwice,
		"TestEveryKindIsSimulatedAsItDecides":                 TestEveryKindIsSimulatedAsItDecides,
		"TestExpire":                                          TestExpire,
		"TestExpireBySeveralProcessesAtOnce":                  TestExpireBySeveralProcessesAtOnce,
		"TestExpireGoesPastABucketThatIsHeld":                 TestExpireGoesPastABucketThatIsHeld,
		"TestFencesGrowPastWhatWasRolledBack":                 TestFencesGrowPastWhatWasRolledBack,
		"TestFingerprintOutlivesARollback":                    TestFingerprintOutlivesARollback,
		"TestFixedWindowTakesBackOnlyIntoItsOwnWindow":        TestFixedWindowTakesBackOnlyIntoItsOwnWindow,
		"TestFullIsABucketThatNobodyHasUsed":                  TestFullIsABucketThatNobodyHasUsed,
		"TestHistoryOfABucketIsLinearizable":                  TestHistoryOfABucketIsLinearizable,
		"TestHistoryOfAShardedBucketIsLinearizable":           TestHistoryOfAShardedBucketIsLinearizable,
		"TestHistoryOfBatchesIsLinearizable":                  TestHistoryOfBatchesIsLinearizable,
		"TestHoldGivesBack":                                   TestHoldGivesBack,
		"TestHoldRefuses":                                     TestHoldRefuses,
		"TestHoldersAreNeverTooMany":                          TestHoldersAreNeverTooMany,
		"TestInTxGetsEverybodyThroughOnAFewConnections":       TestInTxGetsEverybodyThroughOnAFewConnections,
		"TestLeasesAgreeWithTheExactModel":                    TestLeasesAgreeWithTheExactModel,
		"TestLeasesAreToldOf":                                 TestLeasesAreToldOf,
		"TestLongTransactionDecidesAtThePresent":              TestLongTransactionDecidesAtThePresent,
		"TestManyCallersTakeExactlyWhatTheyAreTold":           TestManyCallersTakeExactlyWhatTheyAreTold,
		"TestNoCostStarvesBesideSmallerOnes":                  TestNoCostStarvesBesideSmallerOnes,
		"TestOneCallAtATimeIsToldTheSameWithoutBatching":      TestOneCallAtATimeIsToldTheSameWithoutBatching,
		"TestOneEndWins":                                      TestOneEndWins,
		"TestOtherVerbsOnSlots":                               TestOtherVerbsOnSlots,
		"TestPruneBringsNoOldRowsBack":                        TestPruneBringsNoOldRowsBack,
		"TestPruneForgivesNoDebtThatAChangeScales":            TestPruneForgivesNoDebtThatAChangeScales,
		"TestPruneLeavesWhatIsFullUnderOneEraAlone":           TestPruneLeavesWhatIsFullUnderOneEraAlone,
		"TestPruneOfCalendarWindows":                          TestPruneOfCalendarWindows,
		"TestRace":                                            TestRace,
		"TestQuotedReadyAtHolds":                              TestQuotedReadyAtHolds,
		"TestReadyAtIsHonest":                                 TestReadyAtIsHonest,
		"TestRecipesOfCosts":                                  TestRecipesOfCosts,
		"TestRecipesOfKinds":                                  TestRecipesOfKinds,
		"TestRecipesOfSpacing":                                TestRecipesOfSpacing,
		"TestRecipesOfVerbs":                                  TestRecipesOfVerbs,
		"TestRefundBeyondWhatIsKnownOfACalendar":              TestRefundBeyondWhatIsKnownOfACalendar,
		"TestRefundEndsWithTheWindow":                         TestRefundEndsWithTheWindow,
		"TestRefusedIsToldAtOnceInATransactionOfTheCallers":   TestRefusedIsToldAtOnceInATransactionOfTheCallers,
		"TestRefusedIsToldOfEachBucketThatRefused":            TestRefusedIsToldOfEachBucketThatRefused,
		"TestRefusedIsToldOfReserve":                          TestRefusedIsToldOfReserve,
		"TestRefusedIsToldWhenTheTransactionHasEnded":         TestRefusedIsToldWhenTheTransactionHasEnded,
		"TestRenew": TestRenew,
		"TestRenewSaysWhenALimitCanNeverGiveThatMuch": TestRenewSaysWhenALimitCanNeverGiveThatMuch,
		"TestReportRefuses":                           TestReportRefuses,
		"TestReservationConfigIsValidated":            TestReservationConfigIsValidated,
		"TestReservationsOnAClosedTransaction":        TestReservationsOnAClosedTransaction,
		"TestReservationsOverTheEndOfACalendarWindow": TestReservationsOverTheEndOfACalendarWindow,
		"TestReserve":                                       TestReserve,
		"TestReserveAndEndInOneTransaction":                 TestReserveAndEndInOneTransaction,
		"TestResetDoesNotMoveABucketBackInTime":             TestResetDoesNotMoveABucketBackInTime,
		"TestResetsBesideBatchesAdmitNoMoreThanTheyRestore": TestResetsBesideBatchesAdmitNoMoreThanTheyRestore,
		"TestRollbackLeavesEveryRowAsItWas":                 TestRollbackLeavesEveryRowAsItWas,
		"TestRollbackToASavepointGivesBackWhatWasTakenInIt": TestRollbackToASavepointGivesBackWhatWasTakenInIt,
		"TestSettle":                                               TestSettle,
		"TestSettleOverSeveralLimits":                              TestSettleOverSeveralLimits,
		"TestShardedLimitsAmongOthersAreAllOrNothing":              TestShardedLimitsAmongOthersAreAllOrNothing,
		"TestShardedReservationsKeepToTheirPolicy":                 TestShardedReservationsKeepToTheirPolicy,
		"TestShardsGiveEveryCostItsTokens":                         TestShardsGiveEveryCostItsTokens,
		"TestShardsReportTheirSum":                                 TestShardsReportTheirSum,
		"TestSlidingWindow":                                        TestSlidingWindow,
		"TestSlidingWindowBesideItsOtherDefinitions":               TestSlidingWindowBesideItsOtherDefinitions,
		"TestSlidingWindowByRules":                                 TestSlidingWindowByRules,
		"TestSlidingWindowIsPruned":                                TestSlidingWindowIsPruned,
		"TestSlidingWindowIsSimulatedAsItDecides":                  TestSlidingWindowIsSimulatedAsItDecides,
		"TestSlidingWindowRefusalsFromMemory":                      TestSlidingWindowRefusalsFromMemory,
		"TestSlotsAndTokensAreTakenTogether":                       TestSlotsAndTokensAreTakenTogether,
		"TestSlotsChangeHandsBetweenManyHolders":                   TestSlotsChangeHandsBetweenManyHolders,
		"TestSlotsOfALimitWhoseRuleChanges":                        TestSlotsOfALimitWhoseRuleChanges,
		"TestSlotsUnderTwoDefinitions":                             TestSlotsUnderTwoDefinitions,
		"TestStart":                                                TestStart,
		"TestTakeAddsUpWhatACallAsksOfOneBucket":                   TestTakeAddsUpWhatACallAsksOfOneBucket,
		"TestTakeUpTo":                                             TestTakeUpTo,
		"TestTakeUpToAtAPrice":                                     TestTakeUpToAtAPrice,
		"TestTakeUpToBeyondWhatIsKnownOfACalendar":                 TestTakeUpToBeyondWhatIsKnownOfACalendar,
		"TestTakeUpToLosesNoFraction":                              TestTakeUpToLosesNoFraction,
		"TestTakeUpToTellsWhatItCost":                              TestTakeUpToTellsWhatItCost,
		"TestTakeUpToUnderRules":                                   TestTakeUpToUnderRules,
		"TestTheChangeComesInTheMidstOfACall":                      TestTheChangeComesInTheMidstOfACall,
		"TestTheChangeComesWhileAReservationEnds":                  TestTheChangeComesWhileAReservationEnds,
		"TestTheClockGoesBeyondACalendarDuringATakeUpTo":           TestTheClockGoesBeyondACalendarDuringATakeUpTo,
		"TestTheClockGoesBeyondWhatIsKnownOfACalendar":             TestTheClockGoesBeyondWhatIsKnownOfACalendar,
		"TestTheFirstInstantIsAnInstantLikeOthers":                 TestTheFirstInstantIsAnInstantLikeOthers,
		"TestTheObserverHearsOfNestedTransactionsWhatWasCommitted": TestTheObserverHearsOfNestedTransactionsWhatWasCommitted,
		"TestThePureStepDecidesAsTheDatabase":                      TestThePureStepDecidesAsTheDatabase,
		"TestThePureStepRefusesWhatIsNoCost":                       TestThePureStepRefusesWhatIsNoCost,
		"TestThePureStepReservesAsTheDatabase":                     TestThePureStepReservesAsTheDatabase,
		"TestThePureStepReservesFromAllShards":                     TestThePureStepReservesFromAllShards,
		"TestThePureStepTakesFromAllShards":                        TestThePureStepTakesFromAllShards,
		"TestTheSourceIsAskedOnceForEachRequest":                   TestTheSourceIsAskedOnceForEachRequest,
		"TestTheStoredKeyOfGlobalIsEmpty":                          TestTheStoredKeyOfGlobalIsEmpty,
		"TestTimeoutIsNotForTransactions":                          TestTimeoutIsNotForTransactions,
		"TestTwoKindsAtOneRow":                                     TestTwoKindsAtOneRow,
		"TestVerbsThatMeanNothingForAKind":                         TestVerbsThatMeanNothingForAKind,
		"TestWaitThatIsWrong":                                      TestWaitThatIsWrong,
		"TestWhatIsChargedWhileAPriceIsTurnedOn":                   TestWhatIsChargedWhileAPriceIsTurnedOn,
		"TestWhatIsGivenBackWhileTheKindChanges":                   TestWhatIsGivenBackWhileTheKindChanges,
		"TestWhatIsSaidOfABucketIsByThePolicyThatHolds":            TestWhatIsSaidOfABucketIsByThePolicyThatHolds,
		"TestWhatIsSettledInATransactionIsUndoneWithIt":            TestWhatIsSettledInATransactionIsUndoneWithIt,
	} {
		t.Run(name, test)
	}
}

// isInMemory reports whether a test is to run on buckets in memory.
func isInMemory(t *testing.T) bool {
	t.Helper()
	return strings.HasPrefix(t.Name(), "TestInMemory/")
}

// rowsInMemory returns the buckets of db whose keys start so, as the method rows does.
func rowsInMemory(db *ratelimittest.DB, keys string) (rows []row) {
	engine, _ := store.EngineOf(db).(*memstore.Tx)
	all := engine.Buckets()
	order := slices.SortedFunc(maps.Keys(all), bucket.Key.Compare)
	for _, k := range order {
		if strings.HasPrefix(k.Key, keys) {
			s := all[k]
			rows = append(rows, row{Name: k.Name, Key: k.Key, Value: s.Value, TS: s.TS, Bits: fmt.Sprintf("%016x", math.Float64bits(s.Value))})
		}
	}
	return rows
}

// plantInMemory writes a row, as calls before have left it.
func plantInMemory(t *testing.T, db *ratelimittest.DB, k bucket.Key, state bucket.State) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		engine := store.EngineOf(tx)
		if _, _, err := engine.Lock(t.Context(), []bucket.Key{k}); err != nil {
			return err
		}
		return engine.Save([]bucket.Key{k}, []bucket.State{state}, nil)
	}))
}

// shareInMemory sets the share of the contract that all processes go by.
func shareInMemory(db *ratelimittest.DB, k bucket.Key, share float64, now time.Time) {
	engine, r := store.EngineOf(db), &store.Report{Key: k, FirstShare: share, NextShare: share}
	engine.ReportPrice(r, now.UnixMicro())
	if r.Upstream.Share != share {
		engine.TurnPrice(r, r.Upstream.BegunUs)
	}
}
